"""READ: one file a system, the only I/O. A source returns a value of :mod:`tokengap.readings` or raises SourceError."""
