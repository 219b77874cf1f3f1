"""The lab: a stand-in engine, users, a naive gateway and real proxies on loopback, and the drill that uses them."""
