// The error text for ranks that did not join; identical on every rank.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace pycoll {

/// "60 s", "0.5 s".
inline std::string format_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

/// "ranks 2, 5 of 8 did not join within 60 s: ..."
inline std::string did_not_join(const std::vector<int>& missing_ranks, int num_ranks,
                                double timeout_s) {
  std::string text = missing_ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < missing_ranks.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(missing_ranks[i]);
  }
  return text + " of " + std::to_string(num_ranks) + " did not join within " +
         format_seconds(timeout_s) + ": check that they were started, and read their output";
}

}  // namespace pycoll
