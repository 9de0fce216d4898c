// The chip that the host side plans for; a CPU has no driver to ask, so that a program names it.
#pragma once

#include <string>

namespace platform_ascendc {

class PlatformAscendC {
public:
    explicit PlatformAscendC(const char* socVersion = "Ascend910B") : socVersion_(socVersion) {}
    const std::string& GetSocVersionName() const { return socVersion_; }

private:
    std::string socVersion_;
};

}  // namespace platform_ascendc
