"""What a Kernel can stand for: shipped, foreign, compiled, retyped images. Loads nothing."""
