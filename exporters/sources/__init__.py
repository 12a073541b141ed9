"""Model sources: from a name, a Hugging Face repository or a path to a bundle that `cascade` can load."""

from exporters.sources.pull import Pulled, fetch, pull
from exporters.sources.report import Reporter, Silent

__all__ = ["Pulled", "Reporter", "Silent", "fetch", "pull"]
