"""From a chosen image to cuLaunchKernelEx: loading, launchers, functions. Knows no Kernel."""
