"""JOIN: pure. No clock, no I/O, no async: ``step(state, readings) -> (state, view)``.

Given the same readings it gives the same answer, so a recorded beat can be replayed. The files, in the order in which
:func:`step` uses them:

``sockets``   which side of which hop each socket is, and what moved since the beat before
``streams``   requests in flight, made from sockets, each a record (``segments``)
``matching``  whose client is whose; ``pairing`` has the comparisons
``rest``      which quiet streams have finished
``client``    is the client connected, stalled, vanished or gone
``endings``   how streams ended, and what an engine runs on without a socket
``ledger``    whose tokens were they, and did anybody get them
``queue``     how long the head of the queue has waited, and how much slack that leaves
``verdict``   busy, idle, stuck ... and why
``fold``      one beat: calls the others and assembles the view
"""

from tokengap.join.fold import State, questions, start, step

__all__ = ["State", "questions", "start", "step"]
