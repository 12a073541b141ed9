"""The part of llama.cpp's C interface that the benchmark needs, for the libraries in node-llama-cpp 3.21.1.

Layouts are those of `include/llama.h` of the llama.cpp release v0.4.0, which that package was built from (it carries
the header in `llama/gitRelease.bundle`). They change between releases, so the defaults that the library itself fills
in are compared with what they must be before anything is run.
"""

import ctypes
import json
import re
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from tests.bench.worker import ContestantError

RELEASE = "v0.4.0"


class ModelParams(ctypes.Structure):
    """`llama_model_params`."""

    _fields_ = (
        *((name, c_void_p) for name in ("devices", "tensor_buft_overrides")),
        *((name, c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, c_void_p) for name in ("tensor_split", "progress_callback", "progress_user_data", "kv_overrides")),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts")),
        *((name, c_bool) for name in ("no_host", "no_alloc", "load_mtp")),
    )


class ContextParams(ctypes.Structure):
    """`llama_context_params`."""

    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")),
        *((name, c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor")),
        *((name, c_float) for name in ("yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        *((name, c_void_p) for name in ("cb_eval", "cb_eval_user_data")),
        *((name, c_int32) for name in ("type_k", "type_v")),
        *((name, c_void_p) for name in ("abort_callback", "abort_callback_data")),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


DEFAULTS: dict[type[ctypes.Structure], dict[str, float]] = {
    ModelParams: {"split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True, "load_mtp": False},
    ContextParams: {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max_per_seq": 1}
    | {"rope_scaling_type": -1, "flash_attn_type": -1, "yarn_beta_slow": -1.0, "defrag_thold": -1.0}
    | {"type_k": 1, "type_v": 1, "offload_kqv": True, "swa_full": True, "kv_unified": False, "n_samplers": 0},
}

FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_free": (None, (c_void_p,)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (POINTER(c_float), (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_log_set": (None, (c_void_p, c_void_p)),
}

_ignore = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda _level, _text, _data: None)
"""Kept here because the library keeps its address."""


def open_library(directory: Path, backends: Sequence[str]) -> tuple[ctypes.CDLL, str]:
    """The library in `directory` with prototypes, and the name of its CPU backend.

    The first of `backends` (such as `haswell`) that this processor can run, or llama.cpp's own choice among all when
    there is none given. Raises ContestantError when the library is another release's or no backend runs.
    """
    built = json.loads((directory / "_nlcBuildMetadata.json").read_text())["buildOptions"]["llamaCpp"]["release"]
    if built != RELEASE:
        raise ContestantError(f"built from llama.cpp {built}; this benchmark knows the layouts of {RELEASE}")
    ggml = ctypes.CDLL(str(directory / f"libggml.{RELEASE}.so"))
    library = ctypes.CDLL(str(directory / f"libllama.{RELEASE}.so"))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_ignore, None)
    _check_layouts(library)
    ggml.ggml_backend_load.restype, ggml.ggml_backend_load.argtypes = c_void_p, (c_char_p,)
    if not backends:
        ggml.ggml_backend_load_all_from_path(str(directory).encode())
    elif not any(ggml.ggml_backend_load(str(directory / f"libggml-cpu-{name}.so").encode()) for name in backends):
        raise ContestantError(f"this processor runs none of the backends {', '.join(backends)}")
    loaded = set(re.findall(r"/libggml-cpu-(\w+)\.so", Path("/proc/self/maps").read_text()))
    return library, " ".join(sorted(loaded))


def _check_layouts(library: ctypes.CDLL) -> None:
    for params in (library.llama_model_default_params(), library.llama_context_default_params()):
        found = {name: getattr(params, name) for name in DEFAULTS[type(params)]}
        if found != DEFAULTS[type(params)]:
            raise ContestantError(f"{type(params).__name__} is laid out in another way: {found}")
