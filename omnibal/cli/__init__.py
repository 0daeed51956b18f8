"""The ``omnibal`` command, one file per subcommand."""
