// The other direction: with one consumer's `released` published relaxed, the producer's writes race
// with what that consumer still reads, and TSan must say so.
#include "weakened.hpp"

#include "traffic.hpp"

int main() {
  const test::Traffic t{2, 2, 2'000, 0, false};
  const test::Arena arena(sizes_of(t));
  test::weakened = &arena.core.consumer(1).released;
  run(arena.core, t);
  std::puts("weakened_release: no race was reported");
}
