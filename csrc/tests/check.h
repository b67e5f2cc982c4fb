// A test is a function with a name that states a fact; CHECK ends the program at the first fact that does not hold.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

struct TestCase {
  const char* name;
  void (*body)();
};

inline std::vector<TestCase>& test_cases() {
  static std::vector<TestCase> cases;
  return cases;
}

struct Registered {
  Registered(const char* name, void (*body)()) { test_cases().push_back({name, body}); }
};

#define TEST(name)                               \
  static void name();                            \
  static Registered registered_##name{#name, name}; \
  static void name()

#define CHECK(fact)                                                                  \
  do {                                                                               \
    if (!(fact)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #fact); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (0)

#define CHECK_OK(call)                                                                                          \
  do {                                                                                                          \
    ::tasuki::Status checked = (call);                                                                          \
    if (!checked.ok()) {                                                                                        \
      std::fprintf(stderr, "%s:%d: %s failed: %s\n", __FILE__, __LINE__, #call, checked.message.c_str());       \
      std::exit(1);                                                                                             \
    }                                                                                                           \
  } while (0)

inline bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

int main() {
  for (const TestCase& test : test_cases()) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.body();
  }
  std::printf("%zu passed in %s\n", test_cases().size(), __BASE_FILE__);
  return 0;
}
