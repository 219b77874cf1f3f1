"""EXPLAIN: one description of each alert, and what is rendered from it.

``site``       a site's own numbers and addresses
``promql``     expressions, from series and never from their bare names
``watch``      what an alert is: its rule, its panel and its runbook, in one value
``watches/``   the alerts, by subject
``recording``  rules that add up over many exporters
``boards/``    the dashboards
``render/``    alerts, runbooks, dashboards and Kubernetes objects as files, from all of it
``files``      files on disk: write, prune, compare; the only part that touches one

A watch is a function of the site: called with a site it gives a :class:`~tokengap.bundle.watch.Watch`, in which rule,
threshold of the panel and words of the runbook have the same numbers. Called with the site as a dashboard sees it, it
gives the same with the dashboard's variables in every query.
"""
