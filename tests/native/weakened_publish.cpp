// The proof that the sanitizer would see it: with the ring's cursor published relaxed, a consumer's
// reads of the slot race with the producer's writes, and TSan must say so.
#include "weakened.hpp"

#include "traffic.hpp"

int main() {
  const test::Traffic t{2, 8, 2'000, 0, false};
  const test::Arena arena(sizes_of(t));
  test::weakened = &arena.core.ring().cursor;
  run(arena.core, t);
  std::puts("weakened_publish: no race was reported");
}
