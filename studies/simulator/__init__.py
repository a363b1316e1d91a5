"""What the simulator is made of: fitted constants, what each mechanism is worth, how long a simulation takes."""
