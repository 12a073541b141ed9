"""Install what `stepwell bench peers` measures against: `python -m tests.bench.fetch_peers DIRECTORY`.

Through npm and pip, into DIRECTORY and nowhere else; then set STEPWELL_PEERS=DIRECTORY. llama-cpp-python is compiled
from source, which needs a C++ compiler and some minutes; `--without-compiling` leaves it out. `--genai GGUF` also
installs onnxruntime-genai and has its builder make a 4-bit model of that file (some minutes, several GB meanwhile).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from cascade.bundle import sha256_file

NODE_PACKAGE = "@node-llama-cpp/linux-x64"
"""The package with node-llama-cpp's prebuilt libraries; node-llama-cpp itself is not needed."""
NODE_VERSION = "3.21.1"
LLAMA_PACKAGES = ("llama-cpp-python==0.3.36", "numpy")
GENAI_PACKAGES = ("onnxruntime-genai==0.18.0", "torch==2.13.0", "transformers>=5", "gguf", "onnx", "onnx_ir")

TO_HUGGING_FACE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, file, out = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float16).save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)
"""
"""The builder reads GGUF of 16 and 32 bits only."""


def node_libraries(directory: Path) -> Path:
    """Where npm puts llama.cpp's libraries."""
    return directory / "node" / "node_modules" / NODE_PACKAGE / "bins" / "linux-x64"


def llama_python(directory: Path) -> Path:
    """The Python that has llama-cpp-python."""
    return directory / "venv" / "bin" / "python"


def genai_python(directory: Path) -> Path:
    """The Python that has onnxruntime-genai."""
    return directory / "genai-venv" / "bin" / "python"


def genai_model(directory: Path, source_sha256: str) -> Path:
    """onnxruntime-genai's model of a GGUF."""
    return directory / "genai-models" / source_sha256[:12]


def fetch_llama(directory: Path, *, compile_too: bool) -> None:
    """Install; raises CalledProcessError when npm or pip fails, after its own message."""
    node = directory / "node"
    node.mkdir(parents=True, exist_ok=True)
    npm = ["npm", "install", "--prefix", str(node), "--no-save", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run([*npm, f"{NODE_PACKAGE}@{NODE_VERSION}"], check=True)
    if compile_too:
        _install(llama_python(directory), LLAMA_PACKAGES)


def fetch_genai(directory: Path, gguf: Path) -> None:
    """Install and build; raises CalledProcessError."""
    python, model = genai_python(directory), genai_model(directory, sha256_file(gguf))
    _install(python, GENAI_PACKAGES)
    if not model.exists():
        with tempfile.TemporaryDirectory(dir=directory) as work:
            source, built = Path(work) / "source", Path(work) / "built"
            folder, file = str(gguf.absolute().parent), gguf.name
            subprocess.run([python, "-c", TO_HUGGING_FACE, folder, file, source], check=True)
            builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
            options = ["-c", f"{work}/cache", "--extra_options", "int4_accuracy_level=4"]
            subprocess.run([*builder, "-i", str(source), "-o", str(built), *options], check=True)
            model.parent.mkdir(exist_ok=True)
            built.rename(model)


def _install(python: Path, packages: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    subprocess.run([str(python), "-m", "pip", "install", *packages], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--without-compiling", action="store_true", help="only the prebuilt libraries of llama.cpp")
    parser.add_argument("--genai", type=Path, metavar="GGUF", help="also onnxruntime-genai, with a model of this file")
    arguments = parser.parse_args()
    fetch_llama(arguments.directory, compile_too=not arguments.without_compiling)
    if arguments.genai:
        fetch_genai(arguments.directory, arguments.genai)
    print(f"export STEPWELL_PEERS={arguments.directory.resolve()}")
