"""The `baton` command. Its modules import what they need when they run, so that `--help` is quick."""
