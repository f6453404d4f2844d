"""The metrics of the card's library, under its names, from what the stand-in counts."""

import os

import habana_standin


class GraphCompilationMetric:
    """Graphs that no recipe was there for; none takes time here."""

    def name(self):
        return "graph_compilation"

    def stats(self):
        new = habana_standin.census().new
        return [("TotalNumber", new), ("TotalTime", 0), ("AvgTime", 0)]


class CpuFallbackMetric:
    """Operators that the host ran in the card's place."""

    def name(self):
        return "cpu_fallback"

    def stats(self):
        found = habana_standin.census().fallbacks
        return [
            ("TotalNumber", found.total()),
            ("FallbackOps", {f"aten::{name}": count for name, count in found.items()}),
        ]


class RecipeCacheMetric:
    """Graphs that a recipe was there for, and others."""

    def name(self):
        return "recipe_cache"

    def stats(self):
        census = habana_standin.census()
        return [
            ("TotalHit", census.reused),
            ("RecipeHit", {}),
            ("TotalMiss", census.new),
            ("RecipeMiss", {}),
        ]


_metrics = [GraphCompilationMetric(), CpuFallbackMetric()]
if os.getenv("PT_HPU_ENABLE_CACHE_METRICS", "").lower() in ("y", "yes", "t", "true", "on", "1"):
    _metrics.append(RecipeCacheMetric())


def metric_global(name):
    return next((each for each in _metrics if each.name() == name), None)
