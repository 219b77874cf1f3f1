"""SERVE, in a terminal: what the live page shows, for those who have a shell there and no browser.

``feed.py`` gets it, from an exporter or by reading this host; ``screen.py`` turns it into lines, and is pure;
``terminal.py`` is the terminal itself; ``command.py`` puts them together.
"""
