"""The Hugging Face hub, through huggingface_hub: its own resume, tokens, mirrors (`HF_ENDPOINT`) and proxies count."""

import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cascade.bundle import sha256_file
from cascade.errors import SourceError
from exporters.sources.catalogue import HubFile, Model
from exporters.sources.report import Reporter
from exporters.sources.store import check_space, mib, read_chunks, sizes_below, space_errors, write_verified

DEFAULT_ENDPOINT = "https://huggingface.co"
PROBE_TIMEOUT_S = 4.0
"""Longest wait for a first answer of the hub; without one the next source is tried."""
METADATA_TIMEOUT_S = 15.0
POLL_S = 0.3
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
OTHER_FILES = ("config.json", "chat_template.jinja", "chat_template.json", "model.safetensors.index.json")


def endpoint() -> str:
    """The hub's address, or its mirror's."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT


def fetch_hub_file(model: Model, source: HubFile, target: Path, reporter: Reporter) -> None:
    """Download one catalogue model; raises SourceError (unreachable, gone, wrong hash)."""
    probe()
    partial = target.parent / ".partial" / "hub"
    check_space(target.parent, 2 * model.size - _size_of(partial), f"downloading {model.title}")
    reporter.say(f"{model.title}: {mib(model.size)} from {source.repo}")
    file = _download(source.repo, source.file, source.revision, partial, model.size, reporter)
    if file.stat().st_size != model.size or sha256_file(file) != model.sha256:
        shutil.rmtree(partial)
        raise SourceError(f"{source.repo}: {source.file} is not the file that the catalogue expects (size or sha256)")
    file.rename(target)
    shutil.rmtree(partial.parent)


def fetch_hub_checkpoint(repo: str, revision: str, file: str | None, directory: Path, reporter: Reporter) -> Path:
    """Download a repository's checkpoint into `directory`; returns the GGUF file or that directory.

    With `file`, that GGUF; else its safetensors with config and tokenizer, or its only GGUF. Raises SourceError.
    """
    probe()
    sizes, hashes = _listing(repo, revision)
    wanted = choose_files(repo, sizes, file)
    partial = directory / ".partial" / "hub"
    missing = [name for name in wanted if not _is_there(directory / name, sizes[name])]
    needed = sum(sizes[name] for name in missing)
    check_space(directory, 2 * needed - _size_of(partial), f"downloading {repo}")
    if missing:
        reporter.say(f"{repo}: {mib(needed)} from {endpoint()}")
    for name in missing:
        fetched = _download(repo, name, revision, partial, sizes[name], reporter)
        digest = hashes.get(name) or sha256_file(fetched)
        write_verified(read_chunks(fetched), directory / name, sizes[name], digest)
        fetched.unlink()
    shutil.rmtree(partial.parent, ignore_errors=True)
    single = wanted[0] if len(wanted) == 1 and wanted[0].endswith(".gguf") else None
    return directory / single if single else directory


def choose_files(repo: str, sizes: dict[str, int], file: str | None) -> list[str]:
    """Which files of a repository make its checkpoint. Raises SourceError naming what there is to choose from."""
    ggufs = sorted(name for name in sizes if name.endswith(".gguf"))
    if file is not None:
        if file not in sizes:
            raise SourceError(f"{repo} has no {file}; its GGUF files: {', '.join(ggufs) or 'none'}")
        return [file]
    weights = sorted(name for name in sizes if name.endswith(".safetensors") and "/" not in name)
    if weights and "config.json" in sizes:
        return weights + [name for name in (*OTHER_FILES, *TOKENIZER_FILES) if name in sizes]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise SourceError(f"{repo} has several GGUF files; say which: hf:{repo}:FILE with one of {', '.join(ggufs)}")
    raise SourceError(f"{repo} has neither safetensors with a config.json nor a GGUF file")


def probe() -> None:
    """Raise SourceError at once when the hub does not answer: its library would try for a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise SourceError("the Hugging Face hub is switched off (HF_HUB_OFFLINE)")
    request = urllib.request.Request(endpoint(), method="HEAD")  # uses the environment's proxies
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S):
            return
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SourceError(f"{endpoint()} cannot be reached ({reason})") from error


def _listing(repo: str, revision: str) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes and (for large files) sha256 by file name."""
    from huggingface_hub import HfApi

    with _hub_errors(repo):
        info = HfApi(endpoint=endpoint()).model_info(
            repo, revision=revision, files_metadata=True, timeout=METADATA_TIMEOUT_S
        )
    siblings = info.siblings or []
    sizes = {item.rfilename: item.size for item in siblings if item.size is not None}
    hashes = {item.rfilename: item.lfs.sha256 for item in siblings if item.lfs is not None}
    return sizes, hashes


def _download(repo: str, file: str, revision: str, partial: Path, size: int, reporter: Reporter) -> Path:
    """One file into `partial`, continuing what is there already; reports the bytes on disk while it runs."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with _hub_errors(repo), space_errors(partial):
        partial.mkdir(parents=True, exist_ok=True)
        before = _size_of(partial) if not any(partial.rglob("*.incomplete")) else 0
        with _watched(lambda: reporter.progress(f"download {file}", min(_size_of(partial) - before, size), size)):
            fetched = hf_hub_download(
                repo,
                file,
                revision=revision,
                local_dir=partial,
                endpoint=endpoint(),
                etag_timeout=METADATA_TIMEOUT_S,
            )
    reporter.progress(f"download {file}", size, size)
    return Path(fetched)


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """huggingface_hub's exceptions -> SourceError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise SourceError(f"{repo} is gated: accept its terms on its page, then `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(f"the hub has no repository {repo!r} (or it is private: `hf auth login`)") from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{repo} has no such revision") from error
    except errors.EntryNotFoundError as error:
        raise SourceError(f"{repo} has no such file") from error
    except errors.HFValidationError as error:
        raise SourceError(f"{repo!r} is not the name of a hub repository (OWNER/REPO)") from error
    except SourceError:
        raise
    except OSError as error:
        # Its HTTP errors derive from OSError in some releases, from the HTTP client's own class in others.
        if error.errno is not None:
            raise
        raise SourceError(f"{repo}: {_first_line(error)}; pull again (what came is kept)") from error
    except Exception as error:
        raise SourceError(f"{repo}: {_first_line(error)}; pull again (what came is kept)") from error


@contextmanager
def _watched(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` every POLL_S while the body runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            report()

    thread = threading.Thread(target=watch, name="hub-progress")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_there(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _size_of(directory: Path) -> int:
    return sum(size for _, size in sizes_below(directory))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
