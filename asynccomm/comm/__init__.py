"""The comm: its session, submission of operations, its methods, how it is made and how it goes on after a loss."""
