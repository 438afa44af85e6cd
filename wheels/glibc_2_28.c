// What libstdc++ of newer systems takes from newer C libraries than wheels may ask for. The linker
// puts it into our libraries, which export nothing: no other library sees it.
#include <unistd.h>

char __libc_single_threaded = 0;  // "there may be threads": counts of references stay atomic

unsigned int arc4random(void) {
  unsigned int word = 0;
  if (getentropy(&word, sizeof(word)) != 0)
    __builtin_trap();
  return word;
}
