"""What a user states about shared cache layers: where they lie and whose entries are believed."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class LayerTrust(StrEnum):
    """Whose entries of a layer are loaded: what is loaded is run."""

    SIGNED = "signed"
    PINNED = "pinned"
    ANYBODY = "anybody"


class CacheLayer(BaseModel):
    """A place that is asked after the private directory, and copied from into it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: str
    """A directory, which is only read, or the URL of an fsspec file system such as `s3://…`."""

    trust: LayerTrust = LayerTrust.SIGNED
    """`signed` with the key that PIECEGRAPH_CACHE_SIGNING_KEY(_FILE) gives, `pinned` to `digests`,
    or by `anybody`: for a place to which nobody else can write, such as the image of a container.
    """

    digests: tuple[str, ...] = ()
    """`Entry.digest` of each entry that a pinned layer may give."""

    write_back: bool = False
    """Whether what is compiled here is put there; URLs only."""

    required: bool = False
    """Whether a failure of the layer is an error; else it is a miss."""

    @property
    def is_url(self) -> bool:
        return "://" in self.at

    @model_validator(mode="before")
    @classmethod
    def _at_least_a_place(cls, given: Any) -> Any:
        return {"at": str(given)} if not isinstance(given, dict | CacheLayer) else given

    @model_validator(mode="after")
    def _consistent(self) -> CacheLayer:
        if (self.trust is LayerTrust.PINNED) != bool(self.digests):
            raise ValueError("digests go with trust='pinned', and only with it")
        if self.write_back and not self.is_url:
            raise ValueError("a directory is only read; give its URL, file://…, to write to it")
        return self
