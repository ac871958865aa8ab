"""Every error that raysd raises on purpose: one tree, each with what is wrong, where, and what to do."""

from __future__ import annotations


class RaysdError(Exception):
    """Something a user can act on. `str()` is the message that the command line prints, without a traceback.

    what: what is wrong, with the value that was seen.
    where: the file and field, URL or artifact it was seen in.
    fix: what to do about it.
    """

    exit_code = 1

    def __init__(self, *, what: str, where: object, fix: str) -> None:
        self.what, self.where, self.fix = what, str(where), fix
        super().__init__(f"{what}\n  where: {self.where}\n  fix:   {fix}")

    def __reduce__(self):
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[RaysdError], what: str, where: str, fix: str) -> RaysdError:
    return kind(what=what, where=where, fix=fix)


class ExperimentError(RaysdError):
    """The configuration cannot work: it is never retried."""

    exit_code = 64


class ArtifactError(RaysdError):
    """A stored artifact is absent, damaged or cannot be written."""


class DamagedError(ArtifactError):
    """What is stored under a name differs from what was written there: the store itself answers."""


class TargetError(RaysdError):
    """The target cannot be fetched or converted, or does not do what the experiment assumes of it."""


class StageError(RaysdError):
    """A stage ran and could not finish."""


class EngineError(RaysdError):
    """A vLLM engine did not start, died, or answered what it must not."""


class MeasurementError(RaysdError):
    """A number cannot be computed from what was measured."""


class TryAgainError(RaysdError):
    """Infrastructure failed; the same call may succeed later."""

    exit_code = 75


class NodeLostError(TryAgainError):
    """A node of the cluster, or what raysd runs on it, has gone."""


def from_dict(fields: dict[str, str]) -> RaysdError:
    """The error that `to_dict` described; an unknown kind becomes a StageError, so that a worker's newer error still shows."""
    kinds = {kind.__name__: kind for kind in _children(RaysdError)}
    return kinds.get(fields["kind"], StageError)(what=fields["what"], where=fields["where"], fix=fields["fix"])


def to_dict(error: RaysdError) -> dict[str, str]:
    """The error as JSON-ready text, to travel from a job to its runner."""
    return {"kind": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}


def _children(kind: type) -> list[type]:
    return [kind] + [grand for child in kind.__subclasses__() for grand in _children(child)]
