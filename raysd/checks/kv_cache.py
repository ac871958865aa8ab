"""The KV cache that the target's and the draft's attention share: whether it has a block size."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from raysd.checks.attention import ROCM_GROUPED, backends_of, kind_of
from raysd.checks.facts import EngineFacts, Facts
from raysd.checks.findings import Finding, error, not_checked
from raysd.checks.kv_blocks import BlockSizes, NotTold, TabledSizes, shared_block, suiting
from raysd.checks.registry import check

AITER_ANY_BLOCK = Version("0.20.0")
"""The first release whose AITER MLA takes blocks of more than one token."""
MLA_DRAFT = "a draft with MLA (architecture Eagle3DeepseekV2ForCausalLM; draft.attention: latent where raysd trains it)"


@check("kv-block-clash", "Attention backends of target and draft that share no KV block size", "https://github.com/vllm-project/vllm/pull/39616")
def clash(facts: Facts) -> Iterable[Finding]:
    """vLLM puts the layers of both into one cache, in which all blocks have one size, and does not start if no size suits all."""
    for engine in facts.engines:
        target, draft = facts.target_backends(engine), draft_backends(facts, engine)
        asked = _asked_block(engine)
        if len(set((*target, *draft))) < 2 and asked is None:
            continue  # nothing to agree on: vLLM is not imported for it
        try:
            found = shared_block(facts.platform, (*target, *draft), asked, _known(facts))
        except NotTold as err:
            yield not_checked(engine.field("block-size"), f"whether one KV cache suits {_words(target, draft)}: {err}", "start the engine once by hand, or use a backend that is in the table")
            continue
        if found.size is not None:
            continue
        alone = _fits_alone(facts, target, asked)
        where = engine.field("block-size") if asked is not None or not draft else engine.draft_field("attention_backend") if facts.rocm else "draft.attention"
        why = f"{_words(target, draft)}: one KV cache holds the layers of both" if draft and alone else f"{_words(target, ())}, on a KV cache of blocks of {asked}"
        yield error(where, f"{why}, and {facts.words} does not start: `{found.words.rstrip('.')}`", _fix(facts, engine, target, draft, asked, alone))


@check("attention-backend-kind", "A backend for another kind of attention than the model has", "https://docs.vllm.ai/en/latest/design/attention_backends/")
def kind(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.rocm else ():
        models = [("target", facts.target, engine.argument("attention-backend"), engine.field("attention-backend"))]
        if engine.drafts:
            models.append(("draft", facts.draft_config, engine.draft_argument("attention_backend"), engine.draft_field("attention_backend")))
        for model, config, named, field in models:
            if config is None or named is None:
                continue
            latent = kind_of(config) in ("latent", "latent_sparse")
            if latent != ("MLA" in str(named).upper()):
                yield error(field, f"{named} is a backend for {'grouped attention' if latent else 'MLA'}, and the {model} has {'MLA' if latent else 'grouped attention'}: "
                            "vLLM refuses it as `not valid for this configuration`", f"remove it, or name one of {'ROCM_AITER_MLA, TRITON_MLA' if latent else ', '.join(ROCM_GROUPED)}")


def draft_backends(facts: Facts, engine: EngineFacts) -> tuple[str, ...]:
    """The attention backends of the draft's layer; empty: nothing drafts, or it is not known."""
    if not engine.drafts or facts.draft_config is None or facts.platform is None:
        return ()
    named = engine.draft_argument("attention_backend")
    kind = kind_of(facts.draft_config)
    latent_on_cpu = facts.cpu_latent if facts.platform == "cpu" and kind == "latent" else "CPU_MLA"
    return backends_of(kind, facts.platform, None if named is None else str(named), engine.env, latent_on_cpu)


def _known(facts: Facts) -> BlockSizes:
    """Who is asked: the installed vLLM where it is the one that is to run, else the table."""
    if facts.probe is not None:
        return facts.probe
    if facts.vllm is None:
        raise NotTold("no version of vLLM is named and none is installed (hardware.vllm)")
    return TabledSizes(facts.vllm)


def _asked_block(engine: EngineFacts) -> int | None:
    asked = engine.argument("block-size")
    return int(asked) if isinstance(asked, int) or isinstance(asked, str) and asked.isdecimal() else None


def _fits_alone(facts: Facts, target: tuple[str, ...], asked: int | None) -> bool:
    return not target or shared_block(facts.platform, target, asked, _known(facts)).size is not None


def _fix(facts: Facts, engine: EngineFacts, target: tuple[str, ...], draft: tuple[str, ...], asked: int | None, alone: bool) -> str:
    """What works, of what is known to."""
    known, ways = _known(facts), []
    if asked is not None and shared_block(facts.platform, (*target, *draft), None, known).size is not None:
        ways.append("remove block-size, so that vLLM chooses one that suits both")
    if draft and alone:
        if facts.rocm and kind_of(facts.draft_config) == "grouped":
            others = [backend for backend in suiting("rocm", target, ROCM_GROUPED, asked, known) if backend not in draft]
            if others:
                ways.append(f"give the draft another attention_backend: {' or '.join(others)}")
        if facts.target_kind == "latent" and kind_of(facts.draft_config) != "latent":
            ways.append(f"use {MLA_DRAFT}")
        if "ROCM_AITER_MLA" in target:
            if facts.base is not None and facts.base < AITER_ANY_BLOCK:
                ways.append(f"use vLLM {AITER_ANY_BLOCK} or later")
            if suiting("rocm", ("TRITON_MLA",), draft, asked, known):
                ways.append(f"set VLLM_ROCM_USE_AITER_MLA: \"0\" in {engine.place}.env, which is slower (TRITON_MLA)")
        if facts.platform == "cpu" and target == ("CPU_MLA",):
            ways.append("or run it on hardware whose MLA takes other blocks (ROCm from vLLM 0.20.0 on, CPUs with AMX)")
    return "; ".join(ways) or "choose another attention-backend for the target"


def _words(target: tuple[str, ...], draft: tuple[str, ...]) -> str:
    return " and ".join(f"{whose} attention runs on {' and '.join(names)}" for whose, names in (("the target's", target), ("the draft's", draft)) if names)
