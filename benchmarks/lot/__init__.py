"""Cases drawn by lot: shapes, what runs them, their timing, what was found."""
