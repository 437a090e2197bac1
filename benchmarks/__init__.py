"""commandbus and its peers side by side: see docs/performance.md."""
