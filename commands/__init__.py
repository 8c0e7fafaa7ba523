"""The `baton` command. Its parts import what they need when they run, so that `--help` is quick."""
