"""How the processes of a job find each other, compare their settings, and let newcomers in."""
