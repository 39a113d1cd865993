import argparse
NAME="bench"; HELP="h"; EXAMPLE="e"
def arguments(parser: argparse.ArgumentParser) -> None: ...
def run(args: argparse.Namespace) -> int: return 0
