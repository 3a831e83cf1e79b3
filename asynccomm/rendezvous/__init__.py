"""Rendezvous: processes of a job find each other, compare their settings, and admit newcomers."""
