"""SERVE: /metrics, JSON, health and the live page.

The beat publishes a view to :class:`~tokengap.web.serving.Serving`; :func:`~tokengap.web.routes.make_app` makes the
routes over it; :class:`~tokengap.web.server.Server` listens. No series has its name in here.
"""
