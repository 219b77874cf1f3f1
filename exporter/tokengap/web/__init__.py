"""SERVE: /metrics, JSON, health and the landing page."""
