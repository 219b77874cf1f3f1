"""A stand-in for NVIDIA's management library, compiled from our own C, so that the real binding and the real reader run
on hosts without a GPU: :mod:`tokengap.lab.nvml.fake`, and what its GPUs say: :mod:`tokengap.lab.nvml.profiles`.
"""
