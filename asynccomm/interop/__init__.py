"""Where asynccomm and other libraries meet."""
