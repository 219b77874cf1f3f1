"""READ: one file a system, the only I/O. Each source returns a value of :mod:`tokengap.readings` or raises SourceError."""
