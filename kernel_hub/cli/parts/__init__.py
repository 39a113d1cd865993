"""What commands are made of: printing, and what more than one of them asks. Knows no command."""
