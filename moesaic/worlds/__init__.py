"""What align trains in and evaluate asks in: the sandbox, judges and environments."""
