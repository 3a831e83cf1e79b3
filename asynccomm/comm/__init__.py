"""What a comm is: its session, how operations are submitted, its methods, how it begins and goes on."""
