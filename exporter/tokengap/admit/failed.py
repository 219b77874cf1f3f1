"""The errors that the gateway answers with itself."""

from __future__ import annotations

import msgspec
from multidict import CIMultiDict


class Failed(Exception):
    """The answer is an error of this proxy: ``status``, and in words what is wrong."""

    def __init__(self, status: int, why: str, kind: str = "proxy_error", retry_after: int | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.kind = kind
        self.retry_after = retry_after

    @property
    def headers(self) -> CIMultiDict[str]:
        """The headers of the answer."""
        headers = CIMultiDict({"Content-Type": "application/json", "Server": "tokengap"})
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        return headers

    @property
    def body(self) -> bytes:
        """The error as OpenAI's API writes errors."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.status}
        return msgspec.json.encode({"error": error})
