"""Advice for flags of other servers that have no counterpart in moeserve, by server."""

from __future__ import annotations

from typing import Final

_BY_ITSELF = "leave it out: it is always on"
_NO_CODE = "leave it out: code of a model's repository is never run"
_FROM_FILE = "leave it out: the model's file determines it"
_PLACED = "experts are placed automatically; --num-gpu-experts N or --placement-rules FILE override that"
_STEP = "use --max-num-batched-tokens N, which limits the tokens of a step"
_KV = "use --kv-cache-dtype q8_0, which stores keys and values in 8 bits"
_BUDGET = "use --gpu-memory-budget GIB, an amount in GiB"
_NUMA = "leave it out: --threads N sets the number of threads"
_NODES = "use --numa-nodes; leave it out to divide weights and threads among the machine's NUMA nodes"
_DEFERRAL = "it was removed: it changed the model's output and made nothing faster"
_DRAFTS = (
    """use --speculative-config '{"method": "auto", "num_speculative_tokens": 3}', or --speculative-model"""
)
_GPUS = "use --gpus, a number of GPUs or a list of theirs such as 0,2, and --parallel"
_BINDING = "use --cpu-binding, which binds threads to cores or NUMA nodes"
_MAPPED = "leave it out: weights are copied into memory; only --weight-layout file maps the file"
_HOST_KV = "use --kv-ram GIB, memory for prefixes behind a GPU's KV pool"
_NO_PREFIXES = "use --prefix-cache off"
_HUB_NAME = "write it after the repository: org/repo:Q4_K_M, or org/repo@REVISION"
_REVISION = "write it after the repository: org/repo@REVISION"
_TOKEN = "set the environment variable HF_TOKEN"
_FOLDER = "set the environment variable HF_HUB_CACHE"
_LOG = "use --log-level, and redirect standard error for a file"
_ADAPTERS = "use --lora-modules NAME=PATH"
_NO_POOLING = "there are no embeddings or rerankers here"
_IN_REQUESTS = "leave it out: requests ask for it"
_TEMPLATE_FIELDS = "send chat_template_kwargs with each request"
_ROPE = "leave it out: the model's file has it"
_RUN = "use `moeserve run MODEL TEXT`, which has it as an argument"
_ONE_PROCESS = "leave it out: one server serves all requests"
_KERNELS = "leave it out: kernels are chosen by hardware"
_TRANSFER = "leave it out: prefixes are kept with --kv-ram and --kv-disk"


def _sampling(field: str) -> str:
    return f"""use --override-generation-config '{{"{field}": VALUE}}', or send it with requests"""


# Server: (advice, its flags).
BY_SERVER: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "llama.cpp": (
        (_BY_ITSELF, "-fa --flash-attn --jinja -cb --cont-batching --metrics --slots --props --warmup -kvu"),
        (_BY_ITSELF, "--kv-unified --cache-prompt --cache-reuse --webui --ui"),
        (_PLACED, "-ncmoe --n-cpu-moe -cmoe --cpu-moe -ot --override-tensor --no-op-offload -fit --fit"),
        (_STEP, "-b --batch-size -ub --ubatch-size"),
        (_KV, "-ctk --cache-type-k -ctv --cache-type-v"),
        ("leave it out: weights are copied into the server's own memory", "--mlock"),
        (_MAPPED, "--no-mmap --mmap -dio --direct-io"),
        (
            "leave it out: the vision tower is on the GPU if the model is and there is room",
            "--mmproj-offload",
        ),
        ("use --mmproj-device cpu", "--no-mmproj-offload"),
        ("leave it out: without --mmproj there is no vision tower", "--no-mmproj"),
        ("use --mmproj auto", "--mmproj-auto"),
        ("download the file, and name it with --model or --mmproj", "-mu --model-url -mmu --mmproj-url"),
        (_HUB_NAME, "-hff --hf-file"),
        (_TOKEN, "-hft --hf-token"),
        ("set the environment variable HF_HUB_OFFLINE=1", "--offline"),
        ("use --reasoning-parser, which names how the model marks its reasoning", "--reasoning-format"),
        ("send thinking_budget or reasoning_effort with requests", "--reasoning-budget -rea --reasoning"),
        (_TEMPLATE_FIELDS, "--chat-template-kwargs"),
        (_DRAFTS, "--draft-max --draft --draft-n --draft-min --draft-n-min --draft-p-min --spec-type -cd"),
        (_DRAFTS, "--spec-draft-n-max --spec-draft-n-min --lookup-cache-static -ngld --n-gpu-layers-draft"),
        (_GPUS, "-sm --split-mode -ts --tensor-split -mg --main-gpu -dev"),
        (_BINDING, "--numa -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll"),
        (_NUMA, "-tb --threads-batch --threads-http"),
        ("use --kv-ram GIB, in GiB instead of MiB", "-cram --cache-ram"),
        ("use --kv-disk FOLDER", "--slot-save-path"),
        ("use --state-snapshot-budget GIB", "--ctx-checkpoints --swa-checkpoints"),
        ("use --kv-window-ratio", "--swa-full"),
        (_NO_PREFIXES, "--no-cache-prompt"),
        ("leave it out: a prompt beyond the context is refused", "--context-shift --no-context-shift --keep"),
        ("leave it out: KV is on the device of its layer", "-nkvo --no-kv-offload"),
        (_ADAPTERS, "--lora --lora-scaled --lora-init-without-apply"),
        ("use --request-timeout SECONDS, the limit for a whole request", "-to --timeout"),
        ("use --model-idle-timeout SECONDS, with several models", "--sleep-idle-seconds"),
        ("use --models-file FILE, or name several models before the flags", "--models-dir --models-preset"),
        ("use --models-memory GIB", "--models-max"),
        ("leave it out: name the key in --api-key, the page in --allowed-origin", "--no-webui --no-ui"),
        ("put a reverse proxy before the server", "--api-prefix --path"),
        (_LOG, "-v --verbose --log-verbose -lv --verbosity --log-verbosity --log-disable --log-file"),
        (_LOG, "--log-colors --log-timestamps --log-prefix"),
        (_NO_POOLING, "--embedding --embeddings --rerank --reranking --pooling"),
        (_ROPE, "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx"),
        (_ROPE, "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv"),
        (_sampling("temperature"), "--temp --temperature"),
        (_sampling("top_k"), "--top-k"),
        (_sampling("top_p"), "--top-p"),
        (_sampling("min_p"), "--min-p"),
        (_sampling("repetition_penalty"), "--repeat-penalty"),
        (_sampling("presence_penalty"), "--presence-penalty"),
        (_sampling("frequency_penalty"), "--frequency-penalty"),
        (_sampling("max_new_tokens"), "-n --predict --n-predict"),
        (_sampling("dry_multiplier"), "--dry-multiplier"),
        (_IN_REQUESTS, "--repeat-last-n --samplers --sampling-seq --mirostat --grammar --grammar-file -j"),
        (_IN_REQUESTS, "--json-schema --logit-bias --ignore-eos --dry-base --typical --xtc-probability"),
        ("use --control-tokens-in-text", "-sp --special"),
        ("leave it out: there are no tools that run here but --mcp-servers", "--tools"),
        (_RUN, "-p --prompt -f --file -cnv --conversation -sys --system-prompt -i --interactive"),
    ),
    "vLLM": (
        (_BY_ITSELF, "--enable-prefix-caching --enable-chunked-prefill --enable-auto-tool-choice"),
        (_BY_ITSELF, "--async-scheduling --enable-prompt-tokens-details --enable-reasoning"),
        (_NO_PREFIXES, "--no-enable-prefix-caching"),
        (_NO_CODE, "--trust-remote-code --tool-parser-plugin --reasoning-parser-plugin --middleware"),
        (_BUDGET, "--gpu-memory-utilization"),
        ("use --max-total-tokens N, the tokens of the KV pool", "--kv-cache-memory-bytes"),
        ("leave it out: experts that do not fit on the GPU stay in RAM", "--cpu-offload-gb"),
        (
            _FROM_FILE,
            "--quantization -q --dtype --tokenizer --tokenizer-mode --hf-config-path --config-format",
        ),
        (_FROM_FILE, "--hf-overrides --rope-theta --kv-cache-dtype-skip-layers --calculate-kv-scales"),
        (_REVISION, "--revision --code-revision --tokenizer-revision"),
        (_TOKEN, "--hf-token"),
        (_FOLDER, "--download-dir"),
        ("use --gpus N --parallel layers", "--pipeline-parallel-size -pp"),
        ("start one server a GPU behind a load balancer", "--data-parallel-size -dp --api-server-count"),
        ("leave it out: --parallel tensor gives each GPU whole experts", "--enable-expert-parallel -ep"),
        (_KERNELS, "--enforce-eager --compilation-config -O -cc --attention-backend --block-size"),
        (_KERNELS, "--disable-custom-all-reduce --max-seq-len-to-capture --moe-backend"),
        (_ONE_PROCESS, "--distributed-executor-backend --headless --scheduling-policy --num-scheduler-steps"),
        (_HOST_KV, "--swap-space --kv-offloading-size --kv-offloading-backend"),
        (_TRANSFER, "--kv-transfer-config"),
        ("use --kv-events-endpoint", "--kv-events-config"),
        (_ADAPTERS, "--enable-lora --max-lora-rank --max-cpu-loras"),
        ("use --image-max-tokens", "--limit-mm-per-prompt --mm-processor-kwargs --mm-encoder-tp-mode"),
        ("leave it out: without --mmproj there is no vision tower", "--language-model-only"),
        (_TEMPLATE_FIELDS, "--default-chat-template-kwargs"),
        ("leave it out: content is given as the template takes it", "--chat-template-content-format"),
        ("use --allowed-origin ORIGIN, once for each", "--allowed-origins"),
        ("use --log-level warning, which leaves out the line a request", "--disable-log-requests"),
        ("use --log-level warning, which leaves out the line a request", "--no-enable-log-requests"),
        (_LOG, "--enable-log-requests --disable-log-stats --max-log-len --disable-uvicorn-access-log"),
        ("put a reverse proxy before the server", "--root-path"),
        (_NO_POOLING, "--task --runner --convert --pooler-config"),
        ("leave it out: schemas are enforced by the server's own grammars", "--guided-decoding-backend"),
        ("leave it out: schemas are enforced by the server's own grammars", "--structured-outputs-config"),
        ("leave it out: up to 20 log probabilities a token", "--max-logprobs --logprobs-mode"),
        ("write the flags out, or set their environment variables", "--config"),
    ),
    "SGLang": (
        (_BUDGET, "--mem-fraction-static"),
        (_STEP, "--chunked-prefill-size --max-prefill-tokens"),
        (_NO_CODE, "--trust-remote-code"),
        (_BY_ITSELF, "--enable-metrics --enable-mixed-chunk --enable-cache-report"),
        (_NO_PREFIXES, "--disable-radix-cache"),
        (_FROM_FILE, "--tokenizer-path --json-model-override-args --torchao-config"),
        (_KERNELS, "--disable-cuda-graph --cuda-graph-max-bs --enable-torch-compile --sampling-backend"),
        (_KERNELS, "--moe-runner-backend --page-size --grammar-backend --disable-overlap-schedule"),
        (_DRAFTS, "--speculative-algorithm --speculative-algo --speculative-num-steps"),
        (_DRAFTS, "--speculative-eagle-topk --speculative-num-draft-tokens"),
        ("use --gpus N --parallel layers", "--pp-size"),
        ("start one server a GPU behind a load balancer", "--dp-size --dp --enable-dp-attention"),
        ("leave it out: --parallel tensor gives each GPU whole experts", "--ep-size --ep"),
        (_HOST_KV, "--enable-hierarchical-cache --hicache-ratio --hicache-size"),
        (_ADAPTERS, "--lora-paths"),
        (_ONE_PROCESS, "--schedule-policy --schedule-conservativeness --stream-interval"),
        (_LOG, "--log-requests --log-requests-level"),
        (_NO_POOLING, "--is-embedding"),
    ),
    "KTransformers": (
        ("use --model, one file or folder with all weights", "--kt-weight-path --gguf-path"),
        (_FROM_FILE, "--kt-method --optimize-config-path"),
        (_NODES, "--kt-threadpool-count --kt-numa-nodes"),
        ("leave it out: experts in GPU memory follow the text", "--kt-enable-dynamic-expert-update"),
        (_PLACED, "--kt-expert-placement-strategy"),
        (_DEFERRAL, "--kt-max-deferred-experts-per-token --max-deferred-experts-per-token"),
        ("use --max-total-tokens N, the tokens of the KV pool", "--cache-lens"),
        (_sampling("max_new_tokens"), "--max-new-tokens"),
    ),
}
ADVICE: Final = {
    flag: text for groups in BY_SERVER.values() for text, flags in groups for flag in flags.split()
}
