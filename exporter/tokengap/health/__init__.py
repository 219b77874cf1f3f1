"""``tokengap health``: is an engine working? One look, without an exporter, made for watchdogs.

``command``  the command: its arguments, what it prints, its exit codes
``look``     an engine's page, read a few times and put to the judge of the exporter (:mod:`tokengap.join.verdict`)
``ask``      the one completion that an engine at rest may be asked for, where that is wanted
``access``   API key, TLS, and requests that end in an answer or in an error of :mod:`tokengap.errors`
``others``   who else is connected to an engine of this host
"""
