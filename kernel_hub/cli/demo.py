import argparse
NAME="demo"; HELP="h"; EXAMPLE="e"
def arguments(parser: argparse.ArgumentParser) -> None: ...
def run(args: argparse.Namespace) -> int: return 0
