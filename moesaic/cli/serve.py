"""Serve a model over HTTP, with an OpenAI-compatible API.

moesaic serve out/smollm2
moesaic serve out/smollm2 --port 8000 --api-key-file keys.txt --metrics-names vllm
moesaic serve out/smollm2 --policy chunked tokens=256 --drafter suffix
moesaic serve out/smollm2 --kv-policy snapkv --kv share=0.25
moesaic serve out/smollm2 --cache-host-gb 4 --cache-disk-gb 20 --cache-dir pages
moesaic serve out/smollm2 --also other=out/tiny --alias gpt-4o
moesaic serve out/smollm2 --know out/kb
moesaic serve out/smollm2 --replicas 2
moesaic serve out/smollm2 --prefill 1 --decode 1
moesaic serve out/qwen3-30b --layout "tp=2 ep=4"
moesaic serve out/qwen3-30b --attention 2 --experts 6 --expert-replicas 2 --rebalance-steps 500
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from moesaic.cli.options import (
    Device,
    Dtype,
    ExpertCache,
    KVOptions,
    KVPolicyName,
    ModelDirectory,
    Offload,
    OffloadFrom,
    SamplingParams,
    Threads,
)

ORDER = 70


def command(
    directory: ModelDirectory,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Options of the policy, the drafter or the parser."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Served model name; default: the directory's name.")] = None,
    alias: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Another name of it; repeatable.")] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="A further model of this server, in a process of its own; repeatable."),
    ] = None,
    know: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]KB", help="A knowledge base that answers may be drawn from; repeatable."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="An API key; others on this machine can see it: a file is safer. Repeatable."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="API keys, one per line, with limits; docs/api/operations.md.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable that holds an API key.")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys of /admin (scale, new weights, drain); none: no /admin.")
    ] = None,
    admin_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable that holds a key of /admin.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Origin of pages that may use this server (CORS); repeatable."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Host name that requests may be sent to, without keys; repeatable."),
    ] = None,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Print a line for every request.")] = False,
    mcp: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Origin of an MCP server that the web page may talk to; repeatable."),
    ] = None,
    cache_gb: Annotated[
        float | None, typer.Option(help="Size of the KV cache; default: a quarter of the free memory.")
    ] = None,
    cache_dtype: Annotated[
        Literal["float32", "bfloat16", "float8"] | None,
        typer.Option(help="Dtype of the KV cache; default: that of the model."),
    ] = None,
    cache_host_gb: Annotated[
        float, typer.Option(min=0, help="Host memory for pages evicted from the KV cache, of each engine.")
    ] = 0.0,
    cache_disk_gb: Annotated[float, typer.Option(min=0, help="Disk for pages evicted from there.")] = 0.0,
    cache_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where pages on disk are.")] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Maximum number of running requests.")] = 64,
    max_queue: Annotated[int, typer.Option(min=0, help="Maximum number of queued requests; more get HTTP 429.")] = 256,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Maximum prompt tokens; default: the context length.")
    ] = None,
    max_body_mb: Annotated[float, typer.Option(help="Maximum size of a request body.")] = 8.0,
    request_seconds: Annotated[float, typer.Option(min=0, help="Timeout of a request; 0: none.")] = 600.0,
    response_store_mb: Annotated[
        float, typer.Option(min=0, max=1e9, help="Memory for responses that clients come back to; 0: none are kept.")
    ] = 64.0,
    response_store_hours: Annotated[
        float, typer.Option(min=0, max=1e6, help="How long one is kept after its last use.")
    ] = 24.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Time for running requests to finish at shutdown.")
    ] = 60.0,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Scheduling policy: chunked (prefill) or flow.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Speculative decoding: who drafts tokens; docs/serving.md lists drafters."),
    ] = None,
    output_search: Annotated[
        Literal["graph", "scan"] | None,
        typer.Option(
            help="Greedy tokens by a search of the output matrix (FGD, on a CPU): may miss; misses are counted."
        ),
    ] = None,
    kv_policy: KVPolicyName = None,
    kv: KVOptions = None,
    parser: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Parser of tool calls and reasoning; default: by the chat template."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chat template instead of the model's own.")
    ] = None,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Let clients send chat templates, which are programs.")
    ] = False,
    adapter: Annotated[list[str] | None, typer.Option(metavar="NAME=DIR", help="LoRA adapter; repeatable.")] = None,
    allow_adapters: Annotated[
        bool, typer.Option("--allow-adapters", help="Let clients load adapters from any path the server can read.")
    ] = False,
    pooling: Annotated[
        Literal["mean", "last", "cls", "none"] | None,
        typer.Option(help="Pooling of embeddings; default: as the model says (1_Pooling/config.json), or mean."),
    ] = None,
    scoring: Annotated[
        Literal["cosine", "generative"],
        typer.Option(help="Of rerank and score: embeddings, or how likely the model says yes (Qwen3-Reranker)."),
    ] = "cosine",
    metrics_names: Annotated[
        Literal["moesaic", "vllm"], typer.Option(help="Names of Prometheus metrics; vllm: under vLLM's names too.")
    ] = "moesaic",
    dtype: Dtype = None,
    device: Device = None,
    offload: Offload = None,
    offload_from: OffloadFrom = None,
    expert_cache_gb: ExpertCache = None,
    invariant: Annotated[
        bool,
        typer.Option("--invariant", help="Bits that depend on no batch or layout, in latent attention too (slower)."),
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Workers: engines in processes of their own, or groups with --layout.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help='Ranks that are one engine, such as "tp=2 ep=4"; one process each.'),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(metavar="N", help='Ranks that attend, with --experts: a number of them, or such as "tp=2 dp=2".'),
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Ranks that hold experts and nothing else, with --attention.")
    ] = None,
    expert_replicas: Annotated[
        int, typer.Option(min=0, help="Slots of each rank for further copies of experts that most tokens want.")
    ] = 0,
    rebalance_steps: Annotated[
        int, typer.Option(min=0, help="Steps after which experts move to where the load is; 0: they stay.")
    ] = 0,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Place workers on a Ray cluster; auto: this machine's; local: a new one."),
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Workers that compute prompts; needs --decode.")] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, help="Workers that go on with their pages; needs --prefill.")
    ] = None,
    prefill_layout: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Layout of prefill workers; default: --layout.")
    ] = None,
    decode_layout: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Layout of decode workers; default: --layout.")
    ] = None,
    page_seconds: Annotated[
        float, typer.Option(min=0, help="Wait for pages of another worker; then they are computed again.")
    ] = 5.0,
    page_transport: Annotated[
        Literal["distributed", "nixl"], typer.Option(help="How pages travel: torch.distributed, or NIXL.")
    ] = "distributed",
    placed_by: Annotated[
        Literal["torchrun", "slurm"] | None,
        typer.Option(help="Ranks run in the processes that this launcher started; docs/deploy.md."),
    ] = None,
    stall_seconds: Annotated[
        float, typer.Option(min=0.5, help="Silence after which a worker is killed, and its requests go on elsewhere.")
    ] = 20.0,
    frequency: Annotated[
        str | None,
        typer.Option(metavar="auto|MHZ", help="GPU clock: as low as the SLOs allow (auto), or a fixed one."),
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=1, help="SLO of --frequency auto: time to the first token; default 1000.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(min=0.1, help="SLO of --frequency auto: time per further token; default 50.")
    ] = None,
    threads: Threads = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling for requests without one.")] = None,
    sampling: SamplingParams = None,
) -> None:
    """Serve a model over HTTP: OpenAI-compatible API, metrics, and a web page to chat with it."""
    import asyncio
    import gc
    import sys

    from moesaic.cli.method_options import MethodOptions
    from moesaic.errors import UserError
    from moesaic.know.serving import open_bases
    from moesaic.model.chat_template import read_template
    from moesaic.serve.api.fingerprint import weights_fingerprint
    from moesaic.serve.api.front import print_requests
    from moesaic.serve.api.keys import Keys, key_variable
    from moesaic.serve.api.server import Served, Server, further_settings, listen, serve
    from moesaic.serve.api.service import Service, Settings
    from moesaic.serve.api.web_page import origins
    from moesaic.serve.cluster.engine_process import SWITCH_SECONDS
    from moesaic.serve.cluster.launch import further_options, launch, parse_adapters, parse_models, shared_by
    from moesaic.serve.cluster.messages import EngineOptions
    from moesaic.serve.cluster.placed import Placement, follow_front
    from moesaic.serve.cluster.prefill_decode import Apart
    from moesaic.serve.core.drafters import Drafter
    from moesaic.serve.core.kv.store import refuse_drafts
    from moesaic.serve.core.kv_policies import KVPolicy
    from moesaic.serve.core.output_search import SearchOptions
    from moesaic.serve.core.sampling_text import parse_sampling
    from moesaic.serve.core.scheduling_policies import SchedulingPolicy
    from moesaic.serve.energy.governor import FrequencyOptions
    from moesaic.serve.group.apart.ranks import chosen_layout
    from moesaic.serve.group.experts.rebalancing import for_engine
    from moesaic.serve.offload.loading import offload_options
    from moesaic.serve.pages.outside import TierOptions
    from moesaic.serve.parsers import Parser

    placement = None if placed_by is None else Placement.read(placed_by)
    if placement is not None and placement.rank > 0:
        follow_front(placement)
        return
    for flag, number in (("--cache-gb", cache_gb), ("--max-body-mb", max_body_mb)):
        if number is not None and not 0 < number < 1e9:
            raise UserError(flag, f"must be above 0, not {number:g}")
    chosen = MethodOptions(options or [])
    made_policy = chosen.make(policy, SchedulingPolicy, "--policy")
    made_drafter = chosen.make(drafter, Drafter, "--drafter")
    made_parser = chosen.make(parser, Parser, "--parser")
    chosen.check()
    of_cache = MethodOptions(kv or [])
    made_kv_policy = of_cache.make(kv_policy, KVPolicy, "--kv-policy")
    of_cache.check()
    if made_kv_policy is not None and made_drafter is not None:  # before the model is loaded
        refuse_drafts(made_kv_policy)
    if output_search is not None and any((layout, attention, experts, prefill_layout, decode_layout)):
        raise UserError("--output-search", "is for workers of one process, not for a layout of ranks", "Leave one out.")
    offloaded = offload_options(offload, offload_from, expert_cache_gb)
    if offloaded and any((layout, attention, experts, prefill_layout, decode_layout)):
        raise UserError("--offload", "is for workers of one process, not for a layout of ranks", "Leave one out.")
    settings = Settings(
        name=name or directory.resolve().name,
        aliases=tuple(alias or ()),
        fingerprint=weights_fingerprint(directory),
        keys=Keys.read(api_key_file, api_key_env or key_variable(), given=api_key or ()),
        parser=made_parser,
        chat_template=None if chat_template is None else read_template(chat_template),
        trust_request_chat_template=trust_request_chat_template,
        sampling=parse_sampling(sampling or (), without=("max_tokens", "seed", "stop")),
        max_prompt=max_prompt,
        max_queue=max_queue,
        max_body=int(max_body_mb * 2**20),
        request_seconds=request_seconds or None,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        log_requests=log_requests,
        mcp_origins=origins(mcp or ()),
        pooling=pooling,
        scoring=scoring,
        metrics_names=metrics_names,
        allow_adapters=allow_adapters,
        admin_keys=Keys.read(admin_key_file, admin_key_env, "--admin-key-env"),
        response_bytes=int(response_store_mb * 2**20),
        response_seconds=response_store_hours * 3600,
        knowledge=open_bases(know or ()),
        drain_seconds=drain_seconds,
    )
    adapters = parse_adapters(adapter or (), settings.name)
    further = parse_models(also or (), (settings.name, *settings.aliases, *adapters))
    wide = chosen_layout(layout, attention, experts)
    listener = listen(host, port)  # before the model is loaded, which takes a while, so that a taken port shows at once
    wanted = EngineOptions(
        directory,
        load_options={
            "dtype": dtype,
            "device": device,
            "threads": threads,
            "mode": "invariant" if invariant else "fast",
            **offloaded,
        },
        engine_options={
            "cache_bytes": None if cache_gb is None else int(cache_gb * 2**30),
            "seed": seed,
            "max_requests": max_requests,
            "policy": made_policy,
            "drafter": made_drafter,
            "kv_policy": made_kv_policy,
            "cache_dtype": cache_dtype,
            "output_search": None if output_search is None else SearchOptions(output_search),
            "frequency": FrequencyOptions.parse(frequency, slo_ttft_ms, slo_tpot_ms),
            "tiers": TierOptions(int(cache_host_gb * 2**30), int(cache_disk_gb * 2**30), cache_dir),
            **for_engine(expert_replicas, rebalance_steps, wide),
        },
        layout=wide,
        stall_seconds=stall_seconds,
    )
    layouts = {"prefill_layout": prefill_layout, "decode_layout": decode_layout}
    apart = Apart.of(prefill, decode, page_seconds=page_seconds, transport=page_transport, **layouts)
    if further:
        wanted = shared_by(wanted, 1 + len(further))
        replicas = replicas or (None if apart else 1)
    engine, make_loop = launch(wanted, replicas=replicas, adapters=adapters, apart=apart, ray=ray, placement=placement)
    others = [
        Served(launched[0], further_settings(settings, model, path), launched[1])
        for model, path in further.items()
        for launched in [launch(further_options(wanted, path), replicas=1)]
    ]

    def ready(server: Server, service: Service) -> None:
        gc.freeze()  # what is there now stays: a collection that walks it would hold up every stream
        sys.setswitchinterval(SWITCH_SECONDS)
        shown = f"[{host}]" if ":" in host else host
        print(
            f"moesaic: {', '.join((settings.name, *further))} at http://{shown}:{listener.getsockname()[1]}", flush=True
        )

    if log_requests:
        print_requests()
    running = serve(
        engine, settings, listener, drain_seconds=drain_seconds, ready=ready, make_loop=make_loop, also=others
    )
    asyncio.run(running)
