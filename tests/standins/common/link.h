/* The library's side: its connection to the daemon, and what it does where its user breaks a rule. */
#ifndef STANDIN_LINK_H
#define STANDIN_LINK_H

#include "shared.h"

/* Connects this process, if it is not: `greet` tells the daemon of it, and returns 0. Else an errno. */
int link_up(int (*greet)(int fd));
/* What is asked, with a descriptor or -1, and its answer: 0, or an errno where there is none. */
int link_ask(const void *request, uint64_t len, int fd, void *reply, uint64_t room);
/* What is told: 0, or an errno. */
int link_tell(const void *message, uint64_t len);

/* Ends the process, with a line that names the rule. */
_Noreturn void broken(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
