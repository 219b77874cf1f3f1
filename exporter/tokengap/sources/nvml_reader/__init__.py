"""The reader of NVIDIA GPUs: a process of its own, and the only place that loads NVIDIA's library.

A call into that library can hang for ever, out of reach of any timeout of its process (open-gpu-kernel-modules 1333,
gpud 117), and can crash the process when a GPU is lost (nvitop 139). So the exporter starts this program and reads one
:class:`~tokengap.gpu_readings.GpuSnapshot` a line from it, as JSON; :mod:`tokengap.sources.gpu` is that other end. What
it imports is what it costs: the standard library, msgspec, the binding.

``calls``: asking the library, and its errors. ``device``: one GPU, field by field. ``xids``: the errors that the driver
reports. ``reader``: all GPUs, once a cycle. ``__main__``: the process.
"""
