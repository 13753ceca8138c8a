"""The `onekernel` command: one file per subcommand; parse, call, print. The only place that prints."""
