"""The kernel below everything with an event loop: works, the loop's mailbox, deadlines, tasks."""
