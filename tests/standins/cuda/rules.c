/* Rules of the driver that its users keep: who breaks one does not go on. */
#include "driver.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void broken(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("CUDA stand-in: rule broken: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    va_end(arguments);
    abort();
}
