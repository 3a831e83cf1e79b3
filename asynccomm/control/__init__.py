"""What the ranks tell each other while a collective may be stuck: who is alive, who gave up and why, who is where."""
