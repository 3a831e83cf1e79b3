"""The kernel that everything with an event loop stands on: works, the mailbox of a loop, deadlines, tasks."""
