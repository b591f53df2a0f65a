#define _GNU_SOURCE
#include "link.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void broken(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, STANDIN " stand-in: rule broken: %s\n", line);
    abort();
}
