"""What one router knows of its workers: facts, load accounts, inputs of predictions, and frozen snapshots."""
