"""Users who vanish, in a network of this process's own: ``python -m admit.vanishing``, as root. Prints JSON.

A process of its own, because the network is for its whole life.
"""

from __future__ import annotations

import asyncio
import json

from admit.gateways import admitting, published
from lab.serving import at_rest, engine
from tokengap.lab.network import own_network
from tokengap.lab.users import User, Visit


async def main() -> None:
    network = await own_network()
    assert not isinstance(network, str), network
    async with engine(rate=50) as port, admitting(port) as gateway:
        plans = [("vanish", True), ("vanish", False), ("stall", True)]
        users = [
            User(f"{leaving}-{stream}", max_tokens=400, stream=stream, leave_at=0.5, leaving=leaving, stalls=4.0)
            for leaving, stream in plans
        ]
        outcomes = await asyncio.gather(*(Visit(user, gateway.port, cut=network.cut).run() for user in users))
        truth = await at_rest(port, within=30.0)
        await asyncio.sleep(0.5)  # the last bytes are acknowledged within 40 ms of being read
        page = await published(gateway)
    print(
        json.dumps(
            {
                "requests": {
                    outcome.user.id: {
                        "how": outcome.how,
                        "got": outcome.tokens,
                        "generated": truth.requests[outcome.user.id].generated,
                        "state": truth.requests[outcome.user.id].state,
                        "noticed_after": (truth.requests[outcome.user.id].ended or 0.0) - (outcome.left or 0.0),
                    }
                    for outcome in outcomes
                },
                "page": page,
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main())
