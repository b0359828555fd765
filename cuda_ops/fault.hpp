// fault.hpp: named points between the stores of the protocol, at which a test ends or stops this
// very process. Unarmed (always, but for a test that sets TOKENPIPE_FAULT) a point is one predicted
// branch.
#pragma once

#include <csignal>
#include <cstdint>
#include <cstring>
#include <string>

namespace tp::fault {

struct Plan {
  std::string point;
  uint32_t countdown = 0;
  int signal = 0;
};

inline bool armed = false;
inline Plan plan;

// The `nth` time that this process passes `point`, it sends itself `signal`.
inline void arm(const std::string &point, uint32_t nth, int signal) {
  plan = {point, nth, signal};
  armed = true;
}

inline void hit(const char *name) noexcept {
  if (plan.point != name || --plan.countdown != 0)
    return;
  armed = false;
  std::raise(plan.signal);
}

inline void point(const char *name) noexcept {
  if (armed) [[unlikely]]
    hit(name);
}

} // namespace tp::fault
