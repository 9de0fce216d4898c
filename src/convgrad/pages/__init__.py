"""Self-contained HTML pages: the benchmark report and the interactive drawing of a gradient."""
